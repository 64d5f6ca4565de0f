"""`fluxion train`: trains a predictor from token sequences."""
