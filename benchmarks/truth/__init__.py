"""Training tasks whose critical batch sizes are known without training them."""
