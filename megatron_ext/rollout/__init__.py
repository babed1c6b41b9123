"""From tasks to trajectories: engines, the episode driver, and the coordinator that leases groups."""
