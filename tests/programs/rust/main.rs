//! Threads, channels, sockets, children and files of the standard library. Prints TAP.
use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::panic::catch_unwind;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Barrier, Condvar, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

fn main() {
    let tests: Vec<(&str, fn())> = vec![
        ("64 threads add", || {
            let sum = Arc::new(AtomicU64::new(0));
            let all: Vec<_> = (0..64).map(|_| { let s = sum.clone(); thread::spawn(move || for _ in 0..10_000 { s.fetch_add(1, Ordering::SeqCst); }) }).collect();
            for one in all { one.join().unwrap(); }
            assert_eq!(sum.load(Ordering::SeqCst), 640_000);
        }),
        ("a channel carries 100 000", || {
            let (tx, rx) = mpsc::channel();
            for n in 0..4 { let tx = tx.clone(); thread::spawn(move || for i in 0..25_000u64 { tx.send(i + n).unwrap(); }); }
            drop(tx);
            assert_eq!(rx.iter().count(), 100_000);
        }),
        ("mutex, condition, barrier, rwlock", || {
            let pair = Arc::new((Mutex::new(false), Condvar::new()));
            let other = pair.clone();
            thread::spawn(move || { *other.0.lock().unwrap() = true; other.1.notify_all(); });
            let mut ready = pair.0.lock().unwrap();
            while !*ready { ready = pair.1.wait(ready).unwrap(); }
            let barrier = Arc::new(Barrier::new(8));
            let map = Arc::new(RwLock::new(HashMap::new()));
            let all: Vec<_> = (0..8).map(|n| { let (b, m) = (barrier.clone(), map.clone()); thread::spawn(move || { b.wait(); m.write().unwrap().insert(n, n); }) }).collect();
            for one in all { one.join().unwrap(); }
            assert_eq!(map.read().unwrap().len(), 8);
        }),
        ("scoped threads and a deep stack", || {
            fn deep(n: u64) -> u64 { let pad = [n; 64]; if n == 0 { pad[0] } else { deep(n - 1) + pad[63] - n + 1 } }
            let found = thread::Builder::new().stack_size(64 << 20).spawn(|| deep(50_000)).unwrap().join().unwrap();
            assert_eq!(found, 50_000);
        }),
        ("TCP on loopback, both families", || {
            for host in ["127.0.0.1:0", "[::1]:0"] {
                let listener = TcpListener::bind(host).unwrap();
                let at = listener.local_addr().unwrap();
                let server = thread::spawn(move || { let (mut s, _) = listener.accept().unwrap(); let mut b = vec![]; s.read_to_end(&mut b).unwrap(); b.len() });
                let mut s = TcpStream::connect(at).unwrap();
                s.write_all(&vec![7; 1 << 20]).unwrap();
                drop(s);
                assert_eq!(server.join().unwrap(), 1 << 20);
            }
        }),
        ("UDP and sockets of UNIX", || {
            let a = UdpSocket::bind("127.0.0.1:0").unwrap();
            a.send_to(b"x", a.local_addr().unwrap()).unwrap();
            assert_eq!(a.recv(&mut [0; 8]).unwrap(), 1);
            let (mut a, mut b) = UnixStream::pair().unwrap();
            a.write_all(b"hi").unwrap();
            let mut got = [0; 2];
            b.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"hi");
        }),
        ("children with pipes and exit codes", || {
            let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all("ä你".as_bytes()).unwrap();
            assert_eq!(child.wait_with_output().unwrap().stdout, "ä你".as_bytes());
            assert_eq!(Command::new("sh").args(["-c", "exit 9"]).status().unwrap().code(), Some(9));
        }),
        ("files, links, locks of names, times", || {
            let place = std::env::temp_dir().join(format!("rust-{}", std::process::id()));
            fs::create_dir_all(place.join("a/b")).unwrap();
            fs::write(place.join("a/b/c"), "x").unwrap();
            fs::hard_link(place.join("a/b/c"), place.join("hard")).unwrap();
            std::os::unix::fs::symlink("a/b/c", place.join("soft")).unwrap();
            assert_eq!(fs::read_to_string(place.join("soft")).unwrap(), "x");
            assert!(fs::metadata(place.join("hard")).unwrap().modified().is_ok());
            fs::remove_dir_all(&place).unwrap();
        }),
        ("clocks go on", || {
            let began = Instant::now();
            thread::sleep(Duration::from_millis(20));
            assert!(began.elapsed() >= Duration::from_millis(20));
            assert!(thread::available_parallelism().unwrap().get() >= 1);
        }),
    ];
    for (name, test) in tests {
        println!("{} - {}", if catch_unwind(test).is_ok() { "ok" } else { "not ok" }, name);
    }
}
