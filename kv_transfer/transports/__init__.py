"""The ways in which blocks can travel."""
