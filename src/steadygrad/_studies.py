"""The list of all studies. It loads nothing, so that ``steadygrad --help`` needs no extra."""

__all__ = ["STUDIES"]

# Name and question of each study. A study named x is the command `steadygrad x`, and the folder
# ``studies/x``.
STUDIES = {
    "advise": "Which batch size to train at: measured by training, with the noise scale beside it.",
    "compare": "Whether another optimizer is worth it, tuned alike and judged on fresh seeds.",
    "inspect": "Where float16 gradients underflow or overflow, and which loss scales prevent it.",
}
