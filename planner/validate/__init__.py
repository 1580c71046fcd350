"""`planner validate`: predictions against published measurements, through the planner's own graph and cost formula."""
