"""What the router costs on the way of a stream, beside another router and beside none."""
