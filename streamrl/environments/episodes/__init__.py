"""Driver of episodes: alternates between the policy's turns and the environment's observations."""
