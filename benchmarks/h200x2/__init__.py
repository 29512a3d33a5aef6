"""Push against a stock pull set-up, and against pull with all else equal, on one GPU host."""
