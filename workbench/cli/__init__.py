"""One file a command: each defines `COMMAND` and imports what it needs when it runs."""
