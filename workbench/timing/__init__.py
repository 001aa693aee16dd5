"""How long a variant takes: protocol, samples (worker), statistics (parent), limits of the machine."""
