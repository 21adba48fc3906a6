"""Communication over process groups: collectives along one mesh axis, lanes, reductions, and what ranks agree on."""
