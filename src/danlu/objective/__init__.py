"""Layer 2: what training minimises. An objective owns the head, so whole logits never exist."""
