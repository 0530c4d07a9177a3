"""A script that knows nothing of us: a loss that hangs on its seed, and what the options add."""

import argparse
import json
import random
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--gain", type=float, default=0.0)
parser.add_argument("--noise", type=float, default=0.01)
parser.add_argument("--fail", type=int, nargs="*", default=[])
parser.add_argument("--sleep", type=float, default=0.0)
args = parser.parse_args()
draw = random.Random(args.seed)
loss = 1 + draw.gauss(0, 0.1) - args.gain + random.Random(f"{sys.argv[1:]}").gauss(0, args.noise)
print("val_loss=9.9")
time.sleep(args.sleep)
if args.seed in args.fail:
    sys.exit("broke")
print(f"val_loss={loss}")
print(json.dumps({"loss": loss, "step": 7}))
print("[1, 2]\n{}")
