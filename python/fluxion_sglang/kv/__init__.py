"""KV storage: the host pool, the device windows, and the page tables that address them."""
