import argparse, ast, os, pickle, re, select, signal, sys, tempfile, time, traceback, inspect
os.environ.setdefault("GLOO_SOCKET_IFNAME","lo")
p=argparse.ArgumentParser(); p.add_argument("--backend",default="unisono"); p.add_argument("--cls",default="ours"); p.add_argument("-n",type=int,default=2); p.add_argument("-k",default=""); p.add_argument("-v",action="store_true")
a=p.parse_args()
W=a.n
os.environ.update(BACKEND="gloo",WORLD_SIZE=str(W),TEMP_DIR="/tmp/x")
import torch
torch.set_num_threads(1)
import torch.testing._internal.common_distributed as cd
cd.skip_if_lt_x_gpu=lambda x,**k:(lambda f:f)
cd.skip_if_no_gpu=lambda f:f
import torch.testing._internal.distributed.distributed_test as dt
import torch.distributed as dist
import torch.nn.parallel
import torch._dynamo
import unisono
Base={"ours":lambda:unisono.DistributedDataParallel,"torch":lambda:torch.nn.parallel.DistributedDataParallel}[a.cls]()
class OnCpu(Base):
    def __init__(self,module,device_ids=None,output_device=None,*r,**k):
        super().__init__(module,None,None,*r,**k)
OnCpu.__qualname__="OnCpu"
torch.nn.parallel.DistributedDataParallel=OnCpu
dt.DistributedDataParallel=OnCpu
dt.BACKEND=a.backend
from torch.overrides import TorchFunctionMode
def cpu(d):
    return torch.device("cpu") if d is not None and (isinstance(d,int) or "cuda" in str(d)) else d
class Mode(TorchFunctionMode):
    def __torch_function__(self,f,t,args=(),kw=None):
        kw=dict(kw or {})
        if "device" in kw: kw["device"]=cpu(kw["device"])
        return f(*args,**kw)
def patch(rank):
    T=torch.Tensor; to=T.to
    def tto(self,*args,**k):
        if args and not isinstance(args[0],(torch.Tensor,torch.dtype)): args=(cpu(args[0]),*args[1:])
        if "device" in k: k["device"]=cpu(k["device"])
        return to(self,*args,**k)
    T.to=tto
    T.cuda=lambda s,*a,**k:s
    torch.nn.Module.cuda=lambda s,*a,**k:s
    mto=torch.nn.Module.to
    def mt(self,*args,**k):
        if args and not isinstance(args[0],(torch.Tensor,torch.dtype)): args=(cpu(args[0]),*args[1:])
        if "device" in k: k["device"]=cpu(k["device"])
        return mto(self,*args,**k)
    torch.nn.Module.to=mt
    c=torch.cuda
    c.set_device=lambda d:None; c.current_device=lambda:rank; c.device_count=lambda:W; c.synchronize=lambda *a,**k:None
    c.manual_seed=torch.manual_seed
class Case(dt.TestDistBackend,dt.DistributedTest._DistTestBase):
    pass
src=open(dt.__file__).read(); tree=ast.parse(src)
cls=[n for n in tree.body if isinstance(n,ast.ClassDef) and n.name=="DistributedTest"][0]
fs={n.name:ast.get_source_segment(src,n) for n in cls.body[0].body if isinstance(n,ast.FunctionDef)}
def builds(k,seen=()):
    return "DistributedDataParallel(" in fs[k] or any(builds(h,(*seen,k)) for h in re.findall(r"self\.(_\w+)\(",fs[k]) if h in fs and h not in seen)
tests=[k for k in fs if k.startswith("test_") and builds(k) and re.search(a.k,k)]
def child(rank,name,d,wfd):
    out=os.open(f"{d}/out{rank}",os.O_CREAT|os.O_WRONLY|os.O_APPEND); os.dup2(out,1); os.dup2(out,2)
    res=("passed","")
    try:
        os.environ["TEMP_DIR"]=d; os.environ["BACKEND"]=a.backend
        patch(rank)
        case=Case(name); case.rank=rank; case.file_name=f"{d}/init"
        from datetime import timedelta
        dist.init_process_group(a.backend,init_method=f"file://{d}/init",rank=rank,world_size=W,timeout=timedelta(seconds=dt.CUSTOM_PG_TIMEOUT.get(name,60)))
        case._barrier()
        torch.testing._internal.common_utils.set_rng_seed()
        os.environ["INIT_METHOD"]="x"
        with Mode(): getattr(case,name)()
        case._barrier()
        if dist.is_initialized(): dist.destroy_process_group()
    except dt.unittest.SkipTest as e: res=("skipped",str(e))
    except SystemExit as e:
        why=[s.message for s in cd.TEST_SKIPS.values() if s.exit_code==e.code]
        res=("skipped",why[0]) if why else ("failed",f"exit {e.code}")
    except BaseException as e:
        traceback.print_exc(); res=("failed",f"{type(e).__name__}: {str(e)}"[:300])
    os.write(wfd,pickle.dumps(res)); os._exit(0)
from collections import Counter
count=Counter(); t00=time.time()
for name in tests:
    d=tempfile.mkdtemp(); os.mkdir(d+"/barrier"); os.mkdir(d+"/test_dir"); os.mkdir(d+"/init_dir")
    pids={};t0=time.time(); os.environ["TEMP_DIR"]=d
    dt.Barrier.init()
    for r in range(W):
        rd,wr=os.pipe()
        sys.stdout.flush()
        pid=os.fork()
        if not pid: child(r,name,d,wr)
        os.close(wr); pids[pid]=(r,rd)
    res={}
    end=time.time()+90
    for pid,(r,rd) in pids.items():
        if select.select([rd],[],[],max(0,end-time.time()))[0]:
            b=os.read(rd,100000); res[r]=pickle.loads(b) if b else ("failed","died")
        else: res[r]=("failed","timeout")
        os.close(rd)
        if any(x[0]=="failed" for x in res.values()): end=min(end,time.time()+3)
    for pid in pids:
        os.kill(pid,9); os.waitpid(pid,0)
    worst=next((x for x in res.values() if x[0]=="failed" and "timeout"!=x[1]),next((x for x in res.values() if x[0]=="failed"),next((x for x in res.values() if x[0]=="skipped"),("passed",""))))
    count[worst[0]]+=1
    print(f"{worst[0]:8} {time.time()-t0:5.1f} {name} {worst[1][:160]!r}",flush=True)
    if a.v and worst[0]=="failed": print(open(f"{d}/out0").read()[-3000:], open(f"{d}/out1").read()[-1500:])
print(count,time.time()-t00)
