"""Layer 2: how the work is split over ranks. Each file is one technique and takes plain arguments."""
