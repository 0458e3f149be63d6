"""Layer 0: errors, logging, the environment and the device table. Imports nothing of danlu."""
