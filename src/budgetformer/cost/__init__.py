"""What a model costs: counted, timed, measured or modelled, and each said to be what it is."""
