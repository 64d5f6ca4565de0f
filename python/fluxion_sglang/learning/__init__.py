"""What the policy `adaptive` learns from the requests of a server: which they are like, and what their heads need."""
