"""Runs an engine whose answers under several policies can be compared: `fluxion train` calibrates with it, and
`fluxion bench quality` measures with it."""
