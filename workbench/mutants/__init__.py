"""One file an op: the reference with one rule bent, as the gate must notice."""
