"""The trainers are of the dependency group ``integrations``, which `make test` leaves out."""

import os

# Before they are read in: nothing is asked of a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
