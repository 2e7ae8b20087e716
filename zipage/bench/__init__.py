"""Speed: workloads, the roofline of the same work, and the offline benchmark."""
