import java.io.*;
import java.net.*;
import java.net.http.*;
import java.nio.*;
import java.nio.channels.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.time.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import java.util.stream.*;

/** Threads, processes, channels, watching and HTTP of the standard library. Prints TAP. */
public class Programs {
    interface Body { void run() throws Exception; }

    static void test(String name, Body body) {
        try {
            body.run();
            System.out.println("ok - " + name);
        } catch (Throwable error) {
            var where = Arrays.stream(error.getStackTrace()).filter(e -> e.getClassName().equals("Programs") && !e.getMethodName().equals("check")).findFirst();
            System.out.println("not ok - " + name + "\n# " + error + where.map(e -> " in line " + e.getLineNumber()).orElse(""));
        }
    }

    static void check(boolean held) { if (!held) throw new AssertionError("does not hold"); }

    public static void main(String[] words) throws Exception {
        Path place = Files.createTempDirectory("java");
        test("a pool of 32 threads", () -> {
            var pool = Executors.newFixedThreadPool(32);
            var sum = new AtomicLong();
            for (int i = 0; i < 1000; i++) pool.submit(sum::incrementAndGet);
            pool.shutdown();
            check(pool.awaitTermination(60, TimeUnit.SECONDS) && sum.get() == 1000);
        });
        test("parallel streams and futures", () -> {
            check(IntStream.range(0, 1_000_000).parallel().mapToLong(i -> i).sum() == 499999500000L);
            check(CompletableFuture.supplyAsync(() -> 20).thenCombine(CompletableFuture.supplyAsync(() -> 22), Integer::sum).get() == 42);
        });
        test("processes: pipes, exit codes, handles", () -> {
            var process = new ProcessBuilder("sh", "-c", "cat; exit 7").start();
            try (var out = process.getOutputStream()) { out.write("ä你".getBytes(StandardCharsets.UTF_8)); }
            check(new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8).equals("ä你") && process.waitFor() == 7);
            check(ProcessHandle.current().info().command().isPresent() && ProcessHandle.current().pid() > 0);
            var sleeper = new ProcessBuilder("sleep", "100").start();
            sleeper.destroyForcibly();
            check(sleeper.waitFor() == 137);
        });
        test("memory: the heap fits into the limit", () -> {
            check(Runtime.getRuntime().maxMemory() > (64L << 20) && Runtime.getRuntime().availableProcessors() >= 1);
            var held = new ArrayList<byte[]>();
            for (int i = 0; i < 64; i++) held.add(new byte[1 << 20]);
            System.gc();
            check(held.size() == 64);
        });
        test("files: mapped, locked, walked, links, attributes", () -> {
            Path file = place.resolve("mapped");
            try (var channel = FileChannel.open(file, StandardOpenOption.CREATE, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
                MappedByteBuffer map = channel.map(FileChannel.MapMode.READ_WRITE, 0, 1 << 20);
                map.putInt(0, 42);
                map.force();
                try (var lock = channel.lock()) { check(lock.isValid()); }
            }
            Files.createSymbolicLink(place.resolve("link"), file);
            Files.createDirectories(place.resolve("a/b"));
            Files.move(file, place.resolve("a/b/moved"), StandardCopyOption.ATOMIC_MOVE);
            try (var walk = Files.walk(place)) { check(walk.count() == 5); }
            check(Files.getOwner(place).getName().equals(System.getProperty("user.name")));
        });
        test("watching a directory", () -> {
            try (var watch = FileSystems.getDefault().newWatchService()) {
                place.register(watch, StandardWatchEventKinds.ENTRY_CREATE);
                Files.writeString(place.resolve("seen"), "x");
                var key = watch.poll(30, TimeUnit.SECONDS);
                check(key != null && key.pollEvents().get(0).context().toString().equals("seen"));
            }
        });
        test("HTTP server and client on loopback", () -> {
            var server = com.sun.net.httpserver.HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
            server.createContext("/", exchange -> { byte[] b = exchange.getRequestBody().readAllBytes(); exchange.sendResponseHeaders(200, b.length); exchange.getResponseBody().write(b); exchange.close(); });
            server.setExecutor(Executors.newFixedThreadPool(4));
            server.start();
            var client = HttpClient.newHttpClient();
            var uri = URI.create("http://localhost:" + server.getAddress().getPort() + "/");
            var answers = IntStream.range(0, 50).mapToObj(i -> client.sendAsync(HttpRequest.newBuilder(uri).POST(HttpRequest.BodyPublishers.ofString("n" + i)).build(), HttpResponse.BodyHandlers.ofString())).collect(Collectors.toList());
            for (int i = 0; i < 50; i++) check(answers.get(i).get().body().equals("n" + i));
            server.stop(0);
            ((ExecutorService) server.getExecutor()).shutdown();
        });
        test("selectors and UNIX sockets", () -> {
            var at = UnixDomainSocketAddress.of(place.resolve("socket"));
            try (var server = ServerSocketChannel.open(StandardProtocolFamily.UNIX); var selector = Selector.open()) {
                server.bind(at);
                server.configureBlocking(false);
                server.register(selector, SelectionKey.OP_ACCEPT);
                try (var client = SocketChannel.open(at)) { check(selector.select(10_000) == 1 && server.accept() != null); }
            }
        });
        test("addresses, host name, interfaces", () -> {
            check(InetAddress.getByName("localhost").isLoopbackAddress());
            check(InetAddress.getLocalHost().getHostName() != null);
            check(NetworkInterface.getByName("lo").isUp());
        });
        test("time zones, locale, random, user", () -> {
            check(ZonedDateTime.ofInstant(Instant.EPOCH, ZoneId.of("Asia/Tokyo")).getHour() == 9);
            check(java.nio.charset.Charset.defaultCharset().equals(StandardCharsets.UTF_8));
            check(new java.security.SecureRandom().nextInt() != new java.security.SecureRandom().nextInt());
            check(!System.getProperty("user.home").equals("?"));
        });
        System.exit(0);
    }
}
