"""Rotary position embedding of MLA: in place, out of place, key/value split, concatenation. Imports no Triton."""
