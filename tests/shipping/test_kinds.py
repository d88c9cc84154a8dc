"""Kinds of objects that notebooks hold, both ways: what the notebook made and ranks change, "
"what it changes afterwards."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import pytest

from nbdist.shipping import CannotShip

from .peers import Notebook


class Step(NamedTuple):
    where: str
    source: str


def ranks(source: str) -> Step:
    """A distributed cell."""
    return Step("ranks", source)


def here(source: str) -> Step:
    """An ordinary cell."""
    return Step("here", source)


def true(source: str) -> Step:
    """What must hold in the notebook."""
    return Step("true", source)


def on_1(source: str) -> Step:
    """What must hold on rank 1."""
    return Step("on 1", source)


TORCH = "import torch; from torch import nn\n"
CASES: dict[str, tuple[Step, ...]] = {
    "a data frame": (
        here("import pandas as pd; df=pd.DataFrame({'a':[1,2],'b':['x','y']}); same=[df]; g=df.groupby('a')"),
        ranks("n=g.ngroups; df['c']=df.a*2; df.loc[0,'a']=9"),
        true("n==2 and same[0] is df and list(df.c)==[2,4] and df.a[0]==9"),
        here("df.loc[1,'a']=7; df.drop(columns='b',inplace=True)"),
        ranks("seen=(df.a.tolist(), list(df.columns))"),
        true("seen==([9,7],['a','c'])"),
        on_1("df.a.tolist()==[9,7]"),
    ),
    "a series": (
        here("import pandas as pd; s=pd.Series([1.,2.],name='q'); same=[s]"),
        ranks("s[0]=5; s.name='z'"),
        true("same[0] is s and s[0]==5 and s.name=='z'"),
        here("s[1]=8"),
        ranks("seen=s.tolist()"),
        true("seen==[5,8]"),
    ),
    "an index and a categorical": (
        here("import pandas as pd; i=pd.Index([1,2]); ca=pd.Categorical(['a','b','a']); same=[i,ca]; "
             "mi=pd.MultiIndex.from_product([[1],[2,3]]); days=pd.date_range('2020',periods=3); na=pd.NA\n"
             "months=pd.period_range('2020',periods=2,freq='M').array.copy(); "
             "spans=pd.arrays.IntervalArray.from_breaks([1,2,3]).copy(); also=[months,spans]"),
        ranks("months[0]=months[1]; spans[0]=spans[1]; ca[0]='b'; i.name='nm'; mi.names=['u','v']; days.name='d'; "
              "seen=(mi.tolist(), len(days), na is pd.NA)"),
        true("also[0] is months and also[1] is spans and months[0]==months[1] and spans[0]==spans[1]"),
        true("same[0] is i and same[1] is ca and list(ca)==['b','b','a'] and i.name=='nm'"),
        true("list(mi.names)==['u','v'] and days.name=='d' and seen==([(1,2),(1,3)],3,True)"),
        here("ca[2]='b'; i.name='o'"),
        ranks("seen=(list(ca), i.name)"),
        true("seen==(['b']*3,'o')"),
    ),
    "extension arrays in a frame": (
        here("import pandas as pd; df=pd.DataFrame({'a':pd.arrays.SparseArray([0,0,1])}); "
             "e=pd.array([1,None],dtype='Int64')"),
        ranks("x=int(df.a.sum()); y=int(e.sum()); e[0]=5; df['n']=3"),
        true("x==1 and y==1 and e[0]==5 and list(df.n)==[3,3,3]"),
    ),
    "an image": (
        here("from PIL import Image; im=Image.new('RGB',(4,3),(1,2,3)); same=[im]"),
        ranks("im.putpixel((0,0),(9,9,9)); small=im.resize((2,2)); p=im.getpixel((1,1))"),
        true("same[0] is im and im.getpixel((0,0))==(9,9,9) and small.size==(2,2) and p==(1,2,3)"),
        here("im.putpixel((2,2),(5,5,5)); im.info['k']=1"),
        ranks("q=im.getpixel((2,2)); k=im.info; im.paste((7,7,7),(0,0,1,1))"),
        true("q==(5,5,5) and k=={'k':1} and im.getpixel((0,0))==(7,7,7)"),
    ),
    "an image that is a file": (
        here("from PIL import Image; import io; f=io.BytesIO(); Image.new('L',(4,4),7).save(f,'png'); "
             "im=Image.open(f)"),
        ranks("p=im.getpixel((0,0)); im.putpixel((1,1),9)"),
        true("p==7 and im.getpixel((1,1))==9"),
    ),
    "an optimizer with edited groups": (
        here(TORCH + "m=nn.Linear(2,1); o=torch.optim.SGD(m.parameters(),lr=.1,momentum=.9)"),
        ranks("m(torch.ones(1,2)).sum().backward(); o.step(); o.zero_grad(); o.param_groups[0]['lr']=.5"),
        true("o.param_groups[0]['params'][0] is m.weight and m.weight in o.state and o.param_groups[0]['lr']==.5"),
        here("o.param_groups[0]['lr']=.2; o.add_param_group({'params':[nn.Parameter(torch.zeros(1))],'lr':1.})"),
        ranks("n=len(o.param_groups); lr=o.param_groups[0]['lr']; ok=o.param_groups[0]['params'][0] is m.weight; "
              "o.param_groups[1]['lr']=3"),
        true("(n,lr,ok,o.param_groups[1]['lr'])==(2,.2,True,3)"),
    ),
    "schedulers": (
        here(TORCH + "from torch.optim import lr_scheduler as L\nm=nn.Linear(2,1); "
             "o=torch.optim.AdamW(m.parameters(),lr=.1)\n"
             "s=L.CosineAnnealingLR(o,10); by=L.LambdaLR(o,lambda e:.5**e); flat=L.ReduceLROnPlateau(o)\n"
             "both=L.SequentialLR(o,[L.ConstantLR(o,.1,2),L.ExponentialLR(o,.9)],[2])"),
        ranks("m(torch.ones(1,2)).sum().backward(); o.step(); s.step(); flat.step(1.); both.step(); "
              "lr=o.param_groups[0]['lr']; ok=s.optimizer is o"),
        true("ok and s.optimizer is o and o.param_groups[0]['lr']==lr and s.last_epoch==both.last_epoch==1"),
        here("o.step(); s.step(); both.step()"),
        ranks("seen=(s.last_epoch,both.last_epoch,int(o.state[m.weight]['step']),both._schedulers[0].optimizer is o)"),
        true("seen==(2,2,2,True)"),
    ),
    "a gradient scaler": (
        here("import torch; g=torch.amp.GradScaler('cpu'); g.scale(torch.ones(1)); "
             "off=torch.amp.GradScaler('cpu',enabled=False)"),
        ranks("x=g.get_scale(); g.update(8.); y=off.is_enabled()"),
        true("x==65536.0 and g.get_scale()==8.0 and not y"),
        here("g.update(4.)"),
        ranks("y=g.get_scale()"),
        true("y==4.0"),
    ),
    "loaders": (
        here("import torch; from torch.utils.data import *; ds=TensorDataset(torch.arange(8)); "
             "gen=torch.Generator().manual_seed(1); "
             "dl=DataLoader(ds,batch_size=2,sampler=RandomSampler(ds,generator=gen),"
             "generator=gen); dw=DataLoader(ds,num_workers=1); bs=DataLoader(ds,batch_sampler=BatchSampler("
             "SequentialSampler(ds),3,False)); wr=DataLoader(ds,sampler=WeightedRandomSampler([1.]*8,4))"),
        ranks("n=len(list(dl)); w=sum(b[0].item() for b in dw); k=[len(b[0]) for b in bs]; l=len(list(wr)); "
              "same=dl.sampler.generator is gen and dl.dataset is ds; state=gen.get_state()"),
        true("same and (n,w,k,l)==(4,28,[3,3,2],4) and dl.sampler.generator is gen"),
        true("torch.equal(state,gen.get_state())"),
    ),
    "dataclasses": (
        here("from dataclasses import dataclass, field\n@dataclass\nclass D:\n    a:int=1\n"
             "    b:list=field(default_factory=list)\n"
             "@dataclass(frozen=True)\nclass F:\n    a:int\n    b:list\n"
             "@dataclass(slots=True)\nclass S:\n    a:int\n    b:list=field(default_factory=list)\n"
             "@dataclass(frozen=True,slots=True)\nclass FS:\n    a:int\n    b:list\n"
             "@dataclass(kw_only=True,order=True)\nclass K(D):\n    c:int=3\nd=D(); f=F(1,[]); s=S(1); "
             "fs=FS(1,[]); k=K(c=4)"),
        ranks("d.a=2; d.b.append(1); f.b.append(2); s.a=3; s.b.append(4); fs.b.append(5); k.c=9; n=S(7)"),
        true("(d,f,s,fs,k,n)==(D(2,[1]),F(1,[2]),S(3,[4]),FS(1,[5]),K(a=1,b=[],c=9),S(7))"),
        here("s.a=8; object.__setattr__(fs,'a',6)"),
        ranks("seen=(s.a,fs.a,isinstance(s,S))"),
        true("seen==(8,6,True)"),
    ),
    "private slots": (
        here("class A:\n    __slots__=('__b','c')\n    def __init__(self): self.__b=1\n"
             "    def get(self): return self.__b\n"
             "    def put(self,v): self.__b=v\nclass B(A):\n    __slots__=('__b',)\n"
             "    def __init__(self): super().__init__(); self.__b=5\n"
             "    def mine(self): return self.__b\n    def set(self,v): self.__b=v\nclass C(B): pass\nb=B(); "
             "c=C(); c.z=1"),
        ranks("b.put(2); b.set(6); seen=(b.get(),b.mine()); c.put(3); c.z=2; n=B()"),
        true("seen==(2,6)==(b.get(),b.mine()) and c.get()==3 and c.z==2 and n.get()==1 and type(n) is B"),
        here("b.put(9)"),
        ranks("seen=b.get()"),
        true("seen==9"),
    ),
    "a module made by hand": (
        here("import types; mod=types.ModuleType('made'); mod.x=[1]; same=[mod]; ns=types.SimpleNamespace(a=[1])\n"
             "exec('k=1\\ndef bump():\\n    global k\\n    k+=1\\n    return k', mod.__dict__)"),
        ranks("mod.x.append(2); mod.z=3; ns.a.append(2); ns.b=3; k=mod.bump()"),
        true("same[0] is mod and (mod.x,mod.z,ns.a,ns.b,mod.k,k)==([1,2],3,[1,2],3,2,2)"),
        here("mod.q=5; mod.bump(); del mod.z"),
        ranks("seen=(mod.q,mod.bump(),hasattr(mod,'z'),mod.bump.__globals__ is vars(mod))"),
        true("seen==(5,4,False,True) and mod.k==4"),
    ),
    "hooks of modules": (
        here(TORCH + "m=nn.Linear(2,2); seen=[]; hd=m.register_forward_hook(lambda mod,i,o: seen.append('n'))\n"
             "hb=m.register_full_backward_hook(lambda mod,gi,go: seen.append('b'))"),
        ranks("m(torch.ones(1,2)).sum().backward(); h2=m.register_forward_pre_hook(lambda mod,i: seen.append('r'))"),
        true("seen==['n','b']"),
        here("hd.remove(); m(torch.ones(1,2))"),
        true("seen==['n','b','r']"),
        ranks("m(torch.ones(1,2)); h2.remove()"),
        here("m(torch.ones(1,2))"),
        true("seen==['n','b','r','r'] and len(m._forward_pre_hooks)==0"),
        here("h3=m.register_forward_pre_hook(lambda mod,i,k: seen.append('k'), with_kwargs=True)"),
        ranks("m(torch.ones(1,2)); h3.remove(); m(torch.ones(1,2))"),
        true("seen==['n','b','r','r','k'] and not m._forward_pre_hooks_with_kwargs"),
    ),
    "parametrizations": (
        here(TORCH + "import torch.nn.utils.parametrize as P\nclass Sym(nn.Module):\n"
             "    def forward(self,x): return x.triu()+x.triu(1).T\n"
             "m=nn.Linear(3,3); P.register_parametrization(m,'weight',Sym()); late=nn.Linear(3,3)"),
        ranks("ok=bool((m.weight==m.weight.T).all())\n"
              "with torch.no_grad(): m.parametrizations.weight.original.fill_(2)\n"
              "n=nn.Linear(3,3); P.register_parametrization(n,'weight',Sym()); "
              "P.register_parametrization(late,'weight',Sym())"),
        true("ok and m.weight.sum().item()==18 and all(torch.equal(x.weight,x.weight.T) for x in (n,late))"),
        here("m.bias.data.fill_(7); P.remove_parametrizations(late,'weight')"),
        ranks("seen=(m.bias.tolist(),m.weight.sum().item(),P.is_parametrized(late))"),
        true("seen==([7]*3,18,False)"),
    ),
    "weight norm, spectral norm, pruning": (
        here(TORCH + "import torch.nn.utils.prune as pr; u=nn.utils; "
             "sn=u.parametrizations.spectral_norm(nn.Linear(3,3))\n"
             "wn=u.parametrizations.weight_norm(nn.Linear(2,2)); old=u.weight_norm(nn.Linear(2,2)); "
             "osn=u.spectral_norm(nn.Linear(2,2)); orth=u.parametrizations.orthogonal(nn.Linear(2,2)); "
             "p=nn.Linear(4,4); "
             "pr.l1_unstructured(p,'weight',.5); one=torch.ones(1,2)"),
        ranks("sn(torch.ones(1,3)); w=wn(one); osn(one); f=orth(one); old.weight_g.data.fill_(3); "
              "z=int((p.weight==0).sum())"),
        true("old.weight_g.tolist()==[[3],[3]] and torch.allclose(w,wn(one)) and z==8"),
        here("o=old(one); sn(torch.ones(1,3)); osn(one)"),
        ranks("again=old(one)"),
        true("torch.allclose(o,again)"),
    ),
    "buffers, lists of parameters, batch norm": (
        here(TORCH + "class M(nn.Module):\n    def __init__(self):\n        super().__init__(); "
             "self.register_buffer('b',torch.zeros(2),persistent=False)\n"
             "        self.register_buffer('n',None); self.q=nn.ParameterList([nn.Parameter(torch.ones(1))]); "
             "self.bn=nn.BatchNorm1d(2)\nm=M()"),
        ranks("m.b+=1; m.n=torch.ones(1); m.bn(torch.ones(3,2)); m.q.append(nn.Parameter(torch.zeros(1)))"),
        true("m.b.tolist()==[1,1] and m.n.item()==1 and len(m.q)==2 and m.bn.num_batches_tracked.item()==1"),
        here("m.b.fill_(5); m.n.fill_(6)"),
        ranks("seen=(m.b.tolist(),m.n.item(),'b' in m._non_persistent_buffers_set)"),
        true("seen==([5,5],6,True)"),
    ),
    "lazy modules": (
        here(TORCH + "lz=nn.LazyLinear(3); stays=nn.LazyLinear(3); w=lz.weight"),
        ranks("lz(torch.ones(1,2)); n=len(list(stays.parameters()))"),
        true("type(lz) is nn.Linear and tuple(lz.weight.shape)==(3,2) and lz.weight is w"),
        true("type(stays) is nn.LazyLinear"),
        here("stays(torch.ones(1,4)); lz.weight.data.fill_(2)"),
        ranks("seen=(tuple(stays.weight.shape),lz.weight.sum().item(),type(stays) is nn.Linear)"),
        true("seen==((3,4),12,True)"),
    ),
    "packed sequences": (
        here(TORCH + "ps=nn.utils.rnn.pack_sequence([torch.ones(3),torch.zeros(2)])"),
        ranks("x=ps.data.sum().item(); ps.data[0]=5; made=nn.utils.rnn.pack_sequence([torch.ones(3)])"),
        true("x==3 and ps.data[0].item()==5 and type(made) is type(ps)"),
        here("ps.data[1]=7"),
        ranks("x=ps.data[1].item()"),
        true("x==7"),
    ),
    "sparse, quantised, nested tensors": (
        here("import torch; s=torch.eye(3).to_sparse(); cs=torch.eye(3).to_sparse_csr(); "
             "q=torch.quantize_per_tensor(torch.ones(3),.1,0,torch.qint8); "
             "nt=torch.nested.nested_tensor([torch.ones(2),torch.ones(3)])"),
        ranks("seen=(s.to_dense().sum().item(),cs.to_dense().sum().item(),round(q.dequantize().sum().item()),nt.size(0))"),
        true("seen==(3,3,3,2)"),
        here("s._values().fill_(4); nt[1].fill_(2)"),
        ranks("x=s.to_dense().sum().item(),nt[1].sum().item(); s._values().fill_(5); q.copy_(torch.zeros(3)); "
              "nt[0].fill_(3)"),
        true("x==(12,6) and s.to_dense().sum()==15 and q.dequantize().sum()==0 and nt[0].sum()==6"),
    ),
    "an expanded tensor": (
        here("import torch; one=torch.zeros(1); many=one.expand(5)"),
        ranks("x=many.sum().item(); one.fill_(2)"),
        true("x==0 and many.sum()==10"),
        here("one.fill_(3)"),
        ranks("x=many.sum().item()"),
        true("x==15"),
    ),
    "sources of random numbers": (
        here("import torch, numpy as np, random; g=torch.Generator().manual_seed(3); n=np.random.default_rng(1); "
             "rs=np.random.RandomState(2); rr=random.Random(4); ss=np.random.SeedSequence(5); bg=np.random.PCG64(6)\n"
             "def draw(): return [torch.rand(1,generator=g).item(),n.random(),rs.rand(),rr.random(),bg.random_raw()]"),
        ranks("a=draw(); entropy=ss.entropy"),
        here("b=draw()"),
        ranks("c=draw()"),
        true("entropy==5 and len(set(a+b+c))==15"),
    ),
    "values of the standard library": (
        here("import pathlib,datetime,decimal,fractions,enum,typing,uuid,collections\n"
             "class E(enum.Enum):\n    A=1\n    L=[1]\nclass Fl(enum.Flag): X=1; Y=2\n"
             "class IE(enum.IntEnum): Q=3\nclass NT(typing.NamedTuple):\n"
             "    a:int\n    b:list\nclass TD(typing.TypedDict):\n    a:int\np=pathlib.Path('/tmp'); "
             "dt=datetime.datetime.now(datetime.timezone.utc)\n"
             "de=decimal.Decimal('1.1'); fr=fractions.Fraction(1,3); u=uuid.uuid4(); nt=NT(1,[2]); td=TD(a=1); "
             "e=E.A; li=E.L; fl=Fl.X|Fl.Y; ie=IE.Q\n"
             "ch=collections.ChainMap({'a':1},{'b':2}); ud=collections.UserDict(a=1); by={E.A:1,E.L:2}"),
        ranks("seen=(p.name,dt.tzinfo is not None,de+1,fr*3,e is E.A,li is E.L,fl,ie+1,ch['b'],ud['a'],str(u)); "
              "nt.b.append(3); td['a']=5; "
              "ch['z']=3; ud['q']=2; e2=E.L; made=NT(4,[]); by[E.L]=5"),
        true("seen==('tmp',True,decimal.Decimal('2.1'),1,True,True,fl,4,2,1,str(u))"),
        true("nt.b==[2,3] and td=={'a':5} and ch['z']==3 and ud['q']==2"),
        true("e2 is E.L and type(made) is NT and by=={E.A:1,E.L:5}"),
    ),
    "functions that remember": (
        here("import functools\ncalls=[]\n@functools.lru_cache\ndef lc(x): calls.append(x); return x\n"
             "@functools.singledispatch\n"
             "def sd(x): return 'o'\n@sd.register\ndef _(x:int): return 'i'\nclass C:\n"
             "    @functools.cached_property\n    def cp(self): return [1]\n"
             "    @functools.singledispatchmethod\n    def sm(self,x): return 'o'\n    @sm.register\n"
             "    def _(self,x:int): return 'i'\nk=C(); pm=functools.partial(lc,2)\n"
             "def make():\n    n=0\n    def inc():\n        nonlocal n; n+=1\n    def get(): return n\n"
             "    return inc,get\ninc,get=make()"),
        ranks("x=(lc(3),sd(1),sd('a'),k.cp,k.sm(1),pm()); inc(); y=get(); sd.register(str)(lambda x:'s')"),
        true("x==(3,'i','o',[1],'i',2) and y==1==get() and calls==[3,2] and sd('q')=='s'"),
        here("inc(); k.cp.append(2)\n@sd.register(bytes)\ndef _(x): return 'b'"),
        ranks("z=get(); w=k.cp; v=sd(b''),sd('')"),
        true("z==2 and w is k.cp and w==[1,2] and v==('b','s')"),
    ),
    "weak references": (
        here("import weakref, gc\nclass O: pass\na=O(); b=O(); wv=weakref.WeakValueDictionary(a=a); "
             "wk=weakref.WeakKeyDictionary({b:[1]}); ws=weakref.WeakSet([a])"),
        ranks("wv['b']=b; wk[a]=2; ws.add(b); x=(wv['a'] is a, wk[b], len(ws))"),
        true("x==(True,[1],2) and wv['b'] is b and wk[a]==2 and b in ws and len(ws)==2"),
        here("del wv['a']; ws.discard(a)"),
        ranks("y=(list(wv), b in ws, a in ws)"),
        true("y==(['b'],True,False)"),
        here("del b; gc.collect()"),
        ranks("y=(len(wv),len(ws),len(wk))"),
        true("y==(0,0,1)==(len(wv),len(ws),len(wk))"),
    ),
    "arrays of numbers, views of bytes": (
        here("import array; a=array.array('d',[1,2]); same=[a]; raw=bytearray(b'abcd'); view=memoryview(raw); "
             "two=view.cast('B',(2,2))"),
        ranks("a[0]=5; a.append(7); view[0]=65; x=two[0,0],type(view).__name__"),
        true("same[0] is a and a.tolist()==[5,2,7] and raw==b'Abcd' and x==(65,'memoryview')"),
        here("a.append(1)"),
        ranks("x=a.tolist()"),
        true("x==[5,2,7,1]"),
    ),
    "iterators": (
        here("import itertools; it=itertools.count(5); ch=itertools.chain([1],[2]); en=enumerate('ab'); "
             "z=zip([1,2],[3,4]); ra=iter(range(5))"),
        ranks("x=[next(it),next(ch),next(en),next(z),next(ra)]"),
        here("y=[next(it),next(ch),next(en),next(z),next(ra)]; fresh=[ra]"),
        ranks("w=[next(it),next(ra)]"),
        true("x==[5,1,(0,'a'),(1,3),0] and y==[6,2,(1,'b'),(2,4),1] and w==[7,2]"),
    ),
    "exceptions": (
        here("class Mine(ValueError):\n    def __init__(self,a,b): super().__init__(a); self.b=b\ntry:\n"
             "    try: 1/0\n    except ZeroDivisionError as q: raise Mine(1,2) from q\n"
             "except Mine as q: e=q\ngroup=ExceptionGroup('g',[ValueError(1)]); e.add_note('n'); "
             "missing=FileNotFoundError(2,'no','f'); same=[e]"),
        ranks("x=(type(e) is Mine,e.b,e.args,e.__notes__,type(e.__cause__).__name__,e.__suppress_context__,"
              "missing.filename,group.exceptions[0].args)\ne.b=7; made=Mine(5,6)"),
        true("x==(True,2,(1,),['n'],'ZeroDivisionError',True,'f',(1,))"),
        true("same[0] is e and e.b==7 and made.b==6 and type(made) is Mine and e.__traceback__ is not None"),
        here("e.args=(3,); e.__cause__=None"),
        ranks("x=e.args,e.__cause__"),
        true("x==((3,),None)"),
    ),
    "kinds of arrays": (
        here("import numpy as np, tempfile; st=np.zeros(3,dtype=[('a','i4'),('b','f8',(2,))]); "
             "ma=np.ma.array([1,2,3],mask=[0,1,0])\n"
             "s=np.array(['ab','c']); o=np.array([[1],None],dtype=object); "
             "mm=np.memmap(tempfile.TemporaryFile(),dtype='f4',mode='w+',shape=(4,))\n"
             "rec=np.rec.array([(1,2.)],dtype=[('x',int),('y',float)]); dt=np.array(['2020'],dtype='M8[D]'); "
             "mat=np.matrix([[1,2]]); hidden=np.ma.masked"),
        ranks("st['a'][1]=5; ma[0]=9; ma.mask[2]=True; s[1]='zz'; o[0].append(2); rec.x[0]=8; dt[0]='2021'; "
              "mat[0,0]=7; mm[0]=3; x=hidden is np.ma.masked"),
        true("st['a'].tolist()==[0,5,0] and ma.tolist()==[9,None,None] and s[1]=='zz' and x"),
        true("o[0]==[1,2] and rec.x[0]==8"),
        true("str(dt[0])=='2021-01-01' and mat[0,0]==7 and mm.tolist()==[3,0,0,0]"),
        here("st['b'][0]=4; ma[1]=3; rec.y[0]=1.5; mm[1]=7"),
        ranks("y=(st['b'][0].tolist(),int(ma[1]),float(rec.y[0]),mm.tolist(),type(mm).__name__)"),
        true("y==([4,4],3,1.5,[3,7,0,0],'memmap')"),
    ),
    "a class of arrays": (
        here("import numpy as np\nclass A(np.ndarray): pass\na=np.zeros(3).view(A); a.tag=[1]; base=np.zeros(4); "
             "sub=base[1:].view(A)"),
        ranks("a[0]=5; a.tag.append(2); sub[0]=6; n=np.ones(2).view(A); shared=base[1]"),
        true("a[0]==5 and a.tag==[1,2] and type(n) is A and sub[0]==6==base[1]"),
        here("base[2]=8; a.tag=3"),
        ranks("x=(float(sub[1]),a.tag)"),
        true("x==(8,3)"),
    ),
    "classes of every sort": (
        here("import abc, typing\nfrom types import SimpleNamespace as S\nns=S(a=S(b=[1]))\nclass AB(abc.ABC):\n"
             "    @abc.abstractmethod\n    def f(self): ...\n"
             "class CC(AB):\n    def f(self): return 1\nclass Meta(type):\n    def hey(cls): return cls.__name__\n"
             "class WM(metaclass=Meta): pass\nclass Desc:\n"
             "    def __get__(s,o,t): return 9\nclass WD:\n    d=Desc()\nclass Sing:\n    _i=None\n"
             "    def __new__(cls):\n        if cls._i is None: cls._i=super().__new__(cls)\n"
             "        return cls._i\nsi=Sing(); p=CC()"),
        ranks("ns.a.b.append(2); x=(p.f(),WM.hey(),WD().d,Sing() is si); wm=WM()"),
        true("x==(1,'WM',9,True) and ns.a.b==[1,2] and type(wm) is WM and isinstance(p,AB)"),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_kind(nb: Notebook, name: str) -> None:
    for needs in ("pandas", "PIL"):
        if needs in CASES[name][0].source and importlib.util.find_spec(needs) is None:
            pytest.skip(f"{needs} is not installed")
    for where, source in CASES[name]:
        if where == "here":
            nb.here(source)
        elif where == "ranks":
            arrival = nb.cell(source)
            assert not arrival.handles and not nb.left_out
            assert name == "iterators" or not arrival.notes, arrival.notes
        elif where == "true":
            assert nb.value(source), source
        else:
            assert nb.on(1, source), source


def test_scipy_sparse(nb: Notebook) -> None:
    pytest.importorskip("scipy.sparse")
    nb.here("import scipy.sparse as sp; m=sp.random(50,50,.1,format='csr',random_state=1); same=[m]; before=m.copy()")
    nb.cell("m.data[:]=2; n=(before!=m).nnz; eye=sp.eye(3).tocsc()")
    assert nb.value("same[0] is m and m.data.sum()==2*m.nnz==2*n and eye.nnz==3")
    nb.here("m.data[0]=5; m.resize((60,50))")
    nb.cell("seen=(m.data[0],m.shape)")
    assert nb["seen"] == (5, (60, 50))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        ("import threading; x=threading.Lock()", " is a lock, which cannot leave its process"),
        ("import threading; x=threading.Event()", " is an event"),
        ("x=open('/dev/null')", " is an open file"),
        ("import socket; x=socket.socket()", " is a socket"),
        ("import sqlite3; x=sqlite3.connect(':memory:')", " is a connection"),
        ("import mmap; x=mmap.mmap(-1,100)", " is a memory map"),
        ("x=(i for i in range(3))", " is a live generator"),
        ("import contextvars; x=contextvars.ContextVar('x')", " is a ContextVar, which cannot be pickled"),
        ("import queue; x=queue.Queue()", ".mutex is a lock"),
        ("import subprocess; x=subprocess.Popen(['true']); x.wait()", " is a running process"),
        ("import re; x=re.match('a','a')", " is a Match, which cannot be pickled"),
        ("import sys; x=sys._getframe()", " is a frame"),
        ("class Q: pass\nq=Q()\nimport weakref; x=weakref.ref(q)", " is a ReferenceType, which cannot be pickled"),
        ("x=memoryview(bytearray(b'abc'))[1:]", " is a memoryview: it is a view of a part of some memory"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(nb: Notebook, made: str, what: str) -> None:
    nb.here(made + "\nclass Box: pass\nbox=Box(); box.inner=[1,{'k':x}]")
    with pytest.raises(CannotShip) as caught:
        nb.cell("box.inner")
    assert str(caught.value).startswith(f"cannot ship 'box' (Box): box.inner[1]['k']{what}")
    arrival = nb.cell(made + "\nok=1")
    assert nb["ok"] == 1 and list(arrival.handles) == ["x"] and what.split(": ")[-1].split(" is ")[-1] in repr(nb["x"])
