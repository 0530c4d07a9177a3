"""A training script that knows nothing of steadygrad, as `steadygrad ab` compares.

    steadygrad ab --metric 'val_loss=([0-9.]+)' -- \
        'python examples/ab_script.py --seed {seed}' \
        'python examples/ab_script.py --seed {seed} --alpha 0.01'

A neural network of scikit-learn learns the digits. The seed decides on its weights, the order of
its data, and the images that are held out.
"""

import argparse

from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--alpha", type=float, default=1e-4, help="weight decay")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--epochs", type=int, default=12)
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
train_x, valid_x, train_y, valid_y = train_test_split(images / 16, labels, random_state=args.seed)
model = MLPClassifier(32, alpha=args.alpha, learning_rate_init=args.lr, random_state=args.seed)
for _ in range(args.epochs):
    model.partial_fit(train_x, train_y, classes=range(10))
print(f"val_loss={log_loss(valid_y, model.predict_proba(valid_x)):.5f}")
