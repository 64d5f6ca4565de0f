"""An engine whose answers can be compared under policies: `fluxion train` calibrates with it, `fluxion bench quality`
measures with it."""
