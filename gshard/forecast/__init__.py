"""Know before you run: what a train step takes and sends, without the machine that it is for."""
