"""Problems, images, contexts, and the order in which problems are asked."""
