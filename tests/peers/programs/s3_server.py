"""A store of S3's protocol on loopback, which a test stops, starts again and locks."""

import sys
import urllib.request

import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
url = f"http://127.0.0.1:{port}"
s3 = {"endpoint_url": url, "region_name": "us-east-1"}
boto3.client("s3", **s3).create_bucket(Bucket="bucket")
print(url, flush=True)
for line in sys.stdin:
    if line == "stop\n":
        server.stop()
    elif line == "start\n":
        server = ThreadedMotoServer("127.0.0.1", port=port, verbose=False)
        server.start()
    elif line == "lock\n":  # from now on keys are looked at
        kind = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", kind)
        urllib.request.urlopen(request)
    print("done", flush=True)
