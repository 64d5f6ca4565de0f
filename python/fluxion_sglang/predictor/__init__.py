"""The predictor of each head's budget: features, labels, the network, and its files."""
