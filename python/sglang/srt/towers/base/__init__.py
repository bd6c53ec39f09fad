"""What encoders of images and videos share."""
