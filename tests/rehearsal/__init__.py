"""A world for `target: aws` that costs nothing: a double of AWS, and a host for every instance."""
