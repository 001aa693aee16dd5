"""One file an op: its contract. The file's name is the op's name and it defines `CONTRACT`."""
