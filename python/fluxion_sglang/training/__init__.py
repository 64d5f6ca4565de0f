"""`fluxion train`: from sequences to a predictor."""
