"""The client side of a measurement: targets, workloads, load, statistics, reports. Imports no torch."""
