"""Which batch size: the noise scale, and sample overheads measured by training.

The parts, each by itself: ``plan`` (how much of everything fits a budget), ``trials`` (the pieces
of work, and how each is run), ``critical`` (what branches tell at one point), ``overhead`` (a
first guess for a whole run), ``check`` (runs from scratch), ``rates`` (the learning rate),
``recommend`` (the next trial, and the recommendation), ``summary`` and ``explain`` (words).
"""
