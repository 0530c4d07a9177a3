"""Whether another optimizer is worth it on a task, at which learning rate, and how sure that is."""
