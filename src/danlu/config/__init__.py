"""The typed config: schema, loading with provenance, cross-field rules. Imports no torch, transformers or numpy."""
