"""What the router costs on the way of a stream."""
