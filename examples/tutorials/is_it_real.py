"""
Is this change real?
====================

Somebody trains A, trains B, sees 0.01 less, and believes it. Here A and B differ in the learning
rate of a small classifier of digits, once a little and once tenfold.

First the noise: how far are two runs of A apart, that differ in nothing but the seed?
"""

import tempfile
from dataclasses import replace

import matplotlib.pyplot as plt

import steadygrad
from steadygrad.studies.folder import read_run
from steadygrad.studies.schema import Training
from steadygrad.tasks import load_task

task = load_task("digits-classifier")
folder = tempfile.mkdtemp()
options = {"samples": 3000, "threads": 1, "device": "cpu", "progress": False}
noise = steadygrad.ab(task, out=f"{folder}/noise", **options)
print(noise.summary.answer)

# %%
# That number is worth writing on the wall. Less than it, between two single runs, says nothing.
#
# Now a learning rate that is 3 % higher, and one that is a tenth. Both runs of a pair
# have the same initial weights and see the same images in the same order, so that most of the
# noise cancels. Pairs are run until the interval of their mean difference leaves out zero; it may
# be looked at after every one of them. A difference below 0.02 is as good as none here.

for factor in (1.03, 0.1):
    changed = replace(task, lr=factor * task.lr)
    found = steadygrad.ab(task, changed, smallest_effect=0.02, out=f"{folder}/{factor}", **options)
    (row,) = found.summary.findings
    print(f"{factor:g} times the rate: {found.summary.answer}")
    print(f"  two sigma on one pair: better in {row.two_sigma[0]} of {row.pairs}")

# %%
# The runs are in files, and what was concluded is typed.

runs = read_run(found.folder).results.select(Training)
for arm, name in enumerate("AB"):
    values = [run.loss for run in runs if run.arm == arm]
    plt.plot(range(1, 1 + len(values)), values, "o-", label=name)
plt.xlabel("pair")
plt.ylabel("validation loss")
plt.legend()
plt.show()
print("exit code of the command:", found.summary.exit_code)
