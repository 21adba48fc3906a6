"""What a run will need, worked out without hardware by the layout, grouping and schedule code that runs it."""
