"""Communication over process groups: collectives along one mesh axis, streams, reductions and agreement."""
