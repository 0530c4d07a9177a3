"""The forms of all sentences that a study of batch sizes may say, as regular expressions."""

N = r"([\d,]+)"
X = r"([\d.e+-]+)"
NEEDS = r"(diverged|needs .+? for the same loss(?: \(95% interval .+?\))?)"
OTHER = (
    rf"(No larger batch was trained with every seed|Batch {N}, trained from scratch, {NEEDS}|"
    rf"Whether batch {N} is as good is not known: it {NEEDS}, "
    r"but its (\d+) runs differ too much)\."
)
SETTINGS = (
    rf"batch {N} with learning rate {X}"
    rf"(?:, warmed up from the task's own over the first {N} rows,?)?"
)
STEPS = rf"Over the same rows it takes (\d+)% as many optimizer steps as batch {N}\."
STAY = rf"From scratch over {N} rows: stay at the task's own batch {N}\."
START = rf"Continuing from {N} rows: "
AT_MOST = rf"needs at most (\d+)% more rows than the best batch, over the next {N} rows"
INTERVAL = rf"95% interval {N} to ({N}|no limit)"
STAGES = r"((?:[\d,]+ from [\d,]+(?:, )?)+) rows"
TRIED = (
    rf"\(mean validation loss over the last (\d+)% of {N} rows from scratch at batch {N} by "
    r"learning rate: (.+)\)"
)
NOTHING = rf"(?: That says nothing of a run of {N} rows\.)?"
NO_VERDICT = rf"No verdict on the learning rate {X}: "
FLAT = r"(?P<flat>does not fall|falls by less than three standard errors)"
SEEN = r"(?: \(data seen \d+ times by then\))?"
UNPLANNED = (
    r"( The budget was too short for a run from scratch, and --resume adds none: begin a new "
    r"study with a longer --budget\.)?"
)
FORMS = {
    "trained": rf"From scratch over {N} rows: train at {SETTINGS}\. Trained so, it {NEEDS}\. "
    rf"{STEPS} {OTHER}",
    "stay": rf"{STAY} {OTHER}( No smaller one was tried\.)?",
    "own": rf"{STAY} No larger one was shown to need at most (\d+)% more rows from scratch\."
    rf"{UNPLANNED}",
    "predicted": rf"Predicted, not trained: from scratch over {N} rows, {SETTINGS} should stay "
    rf"within (\d+)% more rows than batch {N}\.{UNPLANNED}",
    "exhausted": r"No batch size for a run from scratch: before each point of training, over the "
    r"second half of the run so far, the validation loss of the smallest batch did not fall "
    r"significantly\.(?: --resume continues the study\.)? Try a lower Task\.lr, more data, or "
    r"another --budget\.",
    "flat": r"No batch size can be recommended: the validation loss of the smallest batch "
    rf"{FLAT} along its branches\..*",
    "nothing": r"Nothing can be said yet: no point of training is measured\.(?: --resume .*)?",
    "going unknown": rf"{START}the critical batch size is not known \({INTERVAL}\); until it is, "
    rf"use batch {N} with learning rate {X}\.",
    "going bounded": rf"{START}batch {N} with learning rate {X} {AT_MOST}; batch {N} diverged "
    r"elsewhere in this study\.",
    "going all": rf"{START}batch {N} with learning rate {X} {AT_MOST}, as do all smaller ones; "
    r"no larger one was tried\.",
    "going": rf"{START}batch {N} with learning rate {X} {AT_MOST}; batch {N} "
    rf"(diverged|needs more) \(limit {N}, {INTERVAL}\)\.",
    "growing predicted": rf"A growing batch is not advised: {STAGES}, predicted from branches and "
    rf"not trained from scratch\. {STEPS}",
    "growing": rf"Growing batch: {STAGES}\. Trained from scratch, it {NEEDS}\. {STEPS}",
    "growing failed": rf"A growing batch is not advised: {STAGES}, trained from scratch, {NEEDS}\.",
    "rate fits": rf"No better learning rate than {X} was found for a run of {N} rows: none has "
    r"a lower loss at each of the last 5 evaluations and saves (\d+)% of the rows "
    rf"{TRIED}\.{NOTHING}",
    "rate same": rf"{NO_VERDICT}over the last (\d+)% of {N} rows from scratch the validation "
    rf"losses at (.+?) are the same as at {X}\. Check that Task\.make_optimizer uses its learning "
    r"rate\.",
    "rate rising": rf"{NO_VERDICT}over the last (\d+)% of {N} rows from scratch the validation "
    r"loss is above that of the evaluations before\. Another rate would look better by "
    r"overfitting less\. Try more data or a smaller --budget\.",
    "rate elsewhere": rf"The learning rate {X} looks too (high) for a run of {N} rows "
    rf"{TRIED}\. That says nothing of a run of {N} rows\.",
    "rate": rf"The learning rate {X} looks too (low|high) for a run of {N} rows {TRIED}(: every "
    r"batch size here was measured with it and is an upper bound)?\. Tune it first: try a "
    r"(higher|lower) one\.",
    "noise unresolved": rf"Gradient noise scale after {N} rows: unresolved(?:, above {N})?\.",
    "noise": rf"Gradient noise scale after {N} rows: {N} \(95% interval {N} to {N}\)\. It is no "
    r"recommendation\.",
    "certainty": r"(?P<partial>Preliminary: the study .+? after measuring (?P<done>\d+) of "
    r"(?P<planned>\d+) points(?:; --resume continues it)?\.)? ?(?:Over the "
    r"(?P<begin>branches that begin|branch that begins) after "
    rf"(?P<where>(?:[\d,]+ rows{SEEN}(?:, | and )?)+) the validation loss {FLAT}, so no batch size "
    r"can be judged there\.)? ?(?:The "
    r"runs from scratch have (?P<count>\d+) seeds\. )?(?P<seeds>The branches(?P<going>, and the "
    r"advice for continuing,)? rest on one seed\.)?",
}
