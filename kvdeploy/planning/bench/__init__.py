"""What a bench asks, and what is made of its samples. Pure."""
