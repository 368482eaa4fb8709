"""What the connector costs an engine: per step, per turn, and until its control port answers."""
