"""Layer 3: what a training would cost, before anything is paid for."""
