"""What the commands of `strata` do, one module each; `cli` parses and calls them."""
