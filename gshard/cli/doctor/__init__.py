"""`gshard doctor` finds what is wrong with this machine before anything is trained on it."""
