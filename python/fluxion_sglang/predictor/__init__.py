"""What each head needs to read: features, labels, the network that learns one from the other, and its files."""
