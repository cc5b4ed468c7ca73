"""`gshard launch`: a script in several processes, on one machine or on each of many."""
