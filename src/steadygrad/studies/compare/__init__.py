"""Whether another optimizer is worth it on a task, at which learning rate, and how sure that is.

``optimizers`` is the table of optimizers and their knobs, ``plan`` says how long the runs are,
``trials`` is the search for learning rates, ``runner`` trains, ``statistics`` is that of paired
seeds, ``summary`` gathers the results and ``explain`` puts them into words.
"""
