"""The bench: contracts, registry, gate, timing, store and command line."""
