"""Estimates what one device needs for a step from the trace, by modelling what compilers do."""
